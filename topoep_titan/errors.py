"""The one exception for wrong user input: what is wrong, the value, the remedy, in one message."""


class InputError(ValueError):
    """The user's input is wrong. Our commands print the message and exit with 2."""
