"""What the commands in scripts/ do once their arguments are read."""
