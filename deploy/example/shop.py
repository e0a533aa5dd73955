"""A small service for the deployment files: bills orders."""

from __future__ import annotations

import logging

from millstream import Message, Router

router = Router()
log = logging.getLogger("shop")


@router.on("orders", group="billing", group_start="0")
async def bill(message: Message) -> None:
    log.info("billed %d bytes", len(message.payload))
