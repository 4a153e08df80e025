"""What `explain()` prints: text, HTML and pictures of a program."""
