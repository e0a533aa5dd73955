from millstream.broker import BlockingBroker as BlockingBroker
from millstream.broker import Broker as Broker
from millstream.broker import BrokerProtocol as BrokerProtocol
from millstream.broker import Limits as Limits
from millstream.broker import open_blocking_broker as open_blocking_broker
from millstream.broker import open_broker as open_broker
from millstream.errors import MillstreamError as MillstreamError
from millstream.messaging import ChangeEvent as ChangeEvent
from millstream.messaging import Message as Message
from millstream.messaging import Publisher as Publisher
from millstream.messaging import Router as Router
from millstream.messaging import Subscriber as Subscriber
from millstream.model import Delivery as Delivery
from millstream.model import Entry as Entry
from millstream.model import EntryId as EntryId
from millstream.model import TrimPolicy as TrimPolicy
from millstream.model import replicated as replicated

__version__: str
