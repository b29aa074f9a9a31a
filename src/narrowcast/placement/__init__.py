"""Where experts live: traces and their statistics, searches, plans and their files, relocation."""
