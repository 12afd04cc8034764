"""The executor: consumes messages, runs jobs and reports every state change to the jobs service."""
