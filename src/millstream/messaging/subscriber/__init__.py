"""The subscriber: one loop reads (``reader``), few tasks handle (``workers``), one settles (``settler``), one keeps
(``keeper``). What is decided is decided purely, in ``pace``, ``held``, ``probation`` and ``lanes``.
"""

from millstream.messaging.subscriber.subscriber import Subscriber

__all__ = ["Subscriber"]
