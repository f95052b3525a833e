"""The one exception of this room: what is wrong, the value, the remedy, in one message."""


class DataError(ValueError):
    """A config, a source or a shard set is wrong. Our commands print it and exit with 2."""
