"""Selection of schedules: canonical keys, the database, the cost model, tuning, its budget and progress."""
