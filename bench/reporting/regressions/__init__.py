"""What a comparison or a history says, for a terminal, a pull request, a script and a CI system."""
