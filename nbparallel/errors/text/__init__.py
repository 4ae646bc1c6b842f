"""Text for people: tables, and characters that terminals, HTML and streams can show."""
