"""The jobs service: owns every job's lifecycle and the outbox, and alone opens the database."""
