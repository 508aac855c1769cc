"""What the notebooks under analysis/ call, and how they are executed and rendered."""
