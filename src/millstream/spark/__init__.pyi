from millstream.spark.source import RedisStreamsSource as RedisStreamsSource

FORMAT: str
