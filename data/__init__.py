"""From text to checksummed token shards, and a loader that resumes exactly on any ranks."""
