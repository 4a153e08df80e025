"""What is measured and remembered of schedules: the database, tuning, its budget and progress."""
