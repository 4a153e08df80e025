"""Selection of schedules: canonical keys, the database, the cost model, tuning and its progress."""
