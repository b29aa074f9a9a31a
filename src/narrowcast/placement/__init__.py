"""Where experts live: traces, statistics, partition searches, the plan, its file, relocation."""
