"""Reads and decodes the pictures of claimed requests. Knows no model and no engine."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from quire.errors import InvalidRequest
from quire.queue.roles import WorkerSide
from quire.wire.pictures import Place, places_of
from quire.wire.protocol import GenerationRequest
from service.worker.incoming.picture_decoder import Decoded, PictureDecoder
from service.worker.model.pictures import DecodedPicture
from service.worker.outgoing.contact import Contact
from service.worker.settings.config import Settings

#: The time is so many times longer for a request that already has tokens: it was within it on its
#: first worker, and this machine may be slower.
TAKEOVER_FACTOR = 4.0


class PictureReading:
    """The pictures of the requests of one intake. `on_poll` is called while one is decoded.

    Only `interrupt` may be called from any thread; all other methods belong to one thread.
    """

    def __init__(
        self,
        broker: WorkerSide,
        *,
        contact: Contact,
        settings: Settings,
        on_poll: Callable[[], None],
    ) -> None:
        self._broker = broker
        self._contact = contact
        self._decoder = PictureDecoder(
            cpu_seconds=settings.picture_decode_seconds,
            memory_bytes=settings.picture_decode_bytes,
            on_poll=on_poll,
        )

    def pictures_of(
        self, request: GenerationRequest, *, is_resumed: bool
    ) -> Sequence[DecodedPicture]:
        """The pictures of a chat, in the order of its messages; the same one is decoded once.

        Raises:
            InvalidRequest: the body is wrong, or a picture has expired or cannot be decoded.
            QuireError: Redis fails.
            ProcessFailed: nothing is known of a picture, or `interrupt` was called.
        """
        if next(places_of(request.body.get("messages")), None) is None:
            return ()
        places = list(places_of(request.parse_body().messages))
        digests = [place.digest for place in places]
        read = partial(self._broker.hold_pictures, digests)
        stored: Mapping[str, bytes] = self._contact.call("read", read)
        for place in places:
            if place.digest not in stored:
                message = "has expired: send the request again, with its pictures"
                raise InvalidRequest(place.field, message)
        fields = {place.digest: place.field for place in reversed(places)}
        files = [(field, stored[digest]) for digest, field in fields.items()]
        factor = TAKEOVER_FACTOR if is_resumed else 1.0
        made = dict(zip(fields, self._decoder.decode_all(files, factor=factor), strict=True))
        return [_decoded(place, made[place.digest]) for place in places]

    def interrupt(self) -> None:
        """Decode nothing more; thread-safe. A waiting `pictures_of` raises ProcessFailed."""
        self._decoder.interrupt()

    @property
    def is_interrupted(self) -> bool:
        """Whether nothing is decoded any more."""
        return self._decoder.is_closed

    def close(self) -> None:
        """End the process that decodes."""
        self._decoder.close()


def _decoded(place: Place, found: Decoded) -> DecodedPicture:
    return DecodedPicture.of(
        bytes.fromhex(place.digest),
        width=found.width,
        height=found.height,
        rgb=found.rgb,
        field=place.field,
    )
