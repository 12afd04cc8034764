"""The dispatcher: carries outbox events from the jobs service to the broker. Holds no state that matters."""
