"""From rows to the small tables that figures and pages show."""
