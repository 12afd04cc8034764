"""One suite for every implementation of a port: stores on SQLite and MariaDB, brokers in memory and RabbitMQ."""
