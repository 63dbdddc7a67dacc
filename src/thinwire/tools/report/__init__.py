"""Reports: records in, tables out. Never measures; imports nothing of bench but its schema."""
