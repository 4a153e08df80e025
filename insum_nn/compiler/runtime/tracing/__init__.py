"""What torch sees of a call while it traces."""
