"""What files in these tests name as handlers."""

seen: list[object] = []


async def note(body: object) -> None:
    """Keep the body."""
    seen.append(body)


NO_FUNCTION = "text"
