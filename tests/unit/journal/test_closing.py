"""Closing a durable broker while commands run: every reply that was sent is true after reopening."""

import threading

from millstream.broker.embedded import Embedded
from millstream.errors import BrokerClosed
from millstream.wire.commands import OK


def test_replied_writes_are_stored_and_later_ones_rejected_at_close(tmp_path):
    for number in range(20):
        directory = tmp_path / str(number)
        embedded = Embedded(directory=directory)
        answered: list[bytes] = []
        surprises: list[object] = []
        began = threading.Barrier(5)

        def write(name: int, embedded=embedded, answered=answered, surprises=surprises, began=began) -> None:
            session = embedded.session()
            began.wait()
            try:
                for count in range(100_000):
                    key = b"%d/%d" % (name, count)
                    if embedded.execute(session, (b"SET", key, b"v")) is not OK:
                        return
                    answered.append(key)
            except BrokerClosed:
                pass
            except Exception as error:
                surprises.append(error)

        threads = [threading.Thread(target=write, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        began.wait()
        while len(answered) < 50:
            pass
        embedded.close()
        for thread in threads:
            thread.join()
        assert surprises == []
        again = Embedded(directory=directory, housekeeping=False)
        there = again.engine.databases[0].values
        assert [key for key in answered if key not in there] == []
        again.close()
