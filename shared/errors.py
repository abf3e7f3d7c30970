"""The one exception that means "the person can fix this": shown as a single line, exit status 2."""


class UserError(Exception):
    """A mistake of the user's, in one sentence that names the value and the remedy."""
