"""What is measured and remembered: the database of schedules, how long a call takes, the folder on disk."""
