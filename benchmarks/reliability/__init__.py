"""What a failing or hostile environment does to the project: python -m benchmarks.reliability.NAME [--help]."""
