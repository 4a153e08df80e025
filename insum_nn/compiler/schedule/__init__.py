"""Selection of schedules: canonical keys, the database, tuning and its progress."""
