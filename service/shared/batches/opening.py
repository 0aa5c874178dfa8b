"""Opens the storage that the settings name."""

from quire.version import install_hint
from service.shared.batches.settings import FileSettings
from service.shared.batches.storage import FolderStorage, StorageError
from service.shared.settings.sources import ConfigurationError


def open_storage(settings: FileSettings) -> FolderStorage | None:
    """The storage; None without a `files_folder`. ConfigurationError if it cannot be used."""
    if settings.files_folder is None:
        if settings.files_url is not None:
            raise ConfigurationError("files_url: needs a files_folder for temporary files")
        return None
    try:
        if settings.files_url is None:
            return FolderStorage(settings.files_folder)
        from service.shared.batches.object_store import ObjectStorage

        return ObjectStorage(settings.files_folder, settings.files_url)
    except ModuleNotFoundError as error:
        hint = install_hint("s3")
        message = f"files_url: the module {error.name} is missing; it needs {hint}"
        raise ConfigurationError(message) from error
    except StorageError as error:
        raise ConfigurationError(f"files_folder: {settings.files_folder}: {error}") from error
