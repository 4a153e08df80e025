"""Selection of schedules: canonical keys, the database, tuning, its budget and progress."""
