"""The platform: its forms, worker pools, jobs, client, runs, logs and failures. Knows no component."""
