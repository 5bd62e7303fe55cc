def claims() -> None:
    """X."""


EPILOG = ""
