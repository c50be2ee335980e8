"""What files, machines and attackers do to the system: campaigns of many cases, python -m benchmarks.reliability.NAME."""
