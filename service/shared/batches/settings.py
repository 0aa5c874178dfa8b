"""The settings that gateway and batcher share: their queue, and where files are."""

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from quire.wire.arguments import MAX_SECONDS
from service.shared.batches.records import MAX_EXPIRY_SECONDS, MIN_EXPIRY_SECONDS
from service.shared.settings.fields import NumShards, QueueName, QueueSeconds, RetentionSeconds
from service.shared.settings.reading import CompanionSettings, Section

#: The limits of OpenAI's batch API.
MAX_FILE_BYTES, MAX_LINES = 200_000_000, 50_000


class SubmittingSettings(Section):
    """The queue that a process submits to."""

    section: ClassVar[str] = "Queue"

    models_file: Path | None = None
    """TOML file of models and the queues that serve them; the same one for all gateways and
    batchers. Unset: every call goes to `queue`.
    """
    queue: QueueName = "default"
    shards: NumShards = 1
    durable: bool = False
    max_queue_seconds: QueueSeconds = 86_400.0
    retention_seconds: RetentionSeconds = 3600.0


class FileSettings(SubmittingSettings, CompanionSettings):
    """Settings of the files API. The same values belong to all gateways and batchers of a queue."""

    section: ClassVar[str] = "Files and batches"

    files_folder: Path | None = None
    """Folder of uploaded files and of the results of batches; the same one for all gateways and
    batchers, unless `files_url` names an object store. Unset: no files and no batches.
    """
    files_url: str | None = Field(default=None, pattern=r"^s3://[^/]+(/.*)?$")
    """Object store for the contents of files, as `s3://bucket/prefix` (extra `s3`; its keys and its
    endpoint are the variables `AWS_*`). `files_folder` is then for temporary files.
    """
    max_file_bytes: int = Field(default=MAX_FILE_BYTES, ge=1, le=1 << 40)
    """Largest file."""
    file_seconds: int = Field(default=MAX_EXPIRY_SECONDS, ge=MIN_EXPIRY_SECONDS, le=MAX_SECONDS)
    """How long files are kept, unless their `expires_after` is shorter, and records of batches
    after their end.
    """
