"""Every error a user can cause. The message says what was wrong, where, and what to do; the command line prints it without a stack trace."""


class Eagle3Error(Exception):
    """Base of all errors whose message alone is enough for the user."""


class ConfigError(Eagle3Error):
    """A setting is unknown, of the wrong type, or impossible together with another."""


class DataError(Eagle3Error):
    """An input file or a row of it can't be used as it is."""


class StoreError(Eagle3Error):
    """The store can't be read, written or locked, or an artifact in it is damaged."""


class TargetError(Eagle3Error):
    """The target model or its tokenizer can't be loaded or is not what was expected."""


class EngineError(Eagle3Error):
    """The engine that answers prompts is broken as a whole, not for one prompt."""


class CaptureError(Eagle3Error):
    """Hidden states are missing, damaged or not those of the row they are asked for."""


class DrafterError(Eagle3Error):
    """A drafter can't be built, loaded or saved with the shapes asked for."""


class TrainingError(Eagle3Error):
    """Training can't go on: nothing to train on, or a loss that is not a number."""
