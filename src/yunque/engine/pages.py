"""Which pages of the cache are free and how many hold each: reference counts, contiguous runs first."""

from collections.abc import Callable, Sequence

from yunque.core.errors import YunqueError


class OutOfPages(YunqueError):
    """Fewer pages are free than were asked for; nothing was allocated."""

    def __init__(self, *, wanted: int, free: int) -> None:
        super().__init__(f"{wanted} pages wanted, {free} free")
        self.wanted = wanted
        self.free = free


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold ``num_tokens`` positions.

    >>> pages_for(17, 16)
    2
    """
    return -(-num_tokens // page_size)


class _RunLengths:
    """Lengths of free runs by first page, in a tree of maxima: the lowest run that is long enough in O(log n)."""

    def __init__(self, num_pages: int) -> None:
        self._size = 1 << (num_pages - 1).bit_length()
        self._longest = [0] * (2 * self._size)

    def set(self, first: int, length: int) -> None:
        longest, node = self._longest, self._size + first
        longest[node] = length
        while node > 1:
            node //= 2
            best = max(longest[2 * node], longest[2 * node + 1])
            if longest[node] == best:
                return
            longest[node] = best

    def lowest(self, length: int) -> int:
        """First page of the lowest run of at least ``length`` pages; where there is none, of the longest run."""
        length = min(length, self._longest[1])
        node = 1
        while node < self._size:
            node *= 2
            if self._longest[node] < length:
                node += 1
        return node - self._size


class PageAllocator:
    """Pages ``reserved`` to ``num_pages - 1``, each free or held by one or more holders.

    The first ``reserved`` pages are never handed out (a runner points padding there) and count as neither free nor
    used: ``num_free + num_used + reserved == num_pages`` always. A call that raises has changed nothing. Allocating
    costs O(pages + pieces · log n), releasing the same after a sort of the pages that came free.
    """

    def __init__(self, num_pages: int, page_size: int, *, reserved: int = 0) -> None:
        if page_size < 1:
            raise ValueError(f"page_size {page_size} must be at least 1")
        if not 0 <= reserved < num_pages:
            raise ValueError(f"reserved {reserved} must be at least 0 and below num_pages {num_pages}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.reserved = reserved
        self._references = [0] * num_pages
        self._last_of: dict[int, int] = {}  # of every free run: its last page by its first
        self._first_of: dict[int, int] = {}  # and its first by its last
        self._lengths = _RunLengths(num_pages)
        self._num_free = 0
        self._listener: Callable[[list[int]], None] | None = None
        self._free_run(reserved, num_pages - 1)

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_used(self) -> int:
        return self.num_pages - self.reserved - self._num_free

    def is_free(self, page: int) -> bool:
        return self.references(page) == 0

    def references(self, page: int) -> int:
        """How many hold ``page``. Raises ``ValueError`` for a page that is not handed out by this allocator."""
        if not self.reserved <= page < self.num_pages:
            raise ValueError(f"page {page} is not among pages {self.reserved} to {self.num_pages - 1}")
        return self._references[page]

    def watch(self, listener: Callable[[list[int]], None]) -> None:
        """Call ``listener`` after every ``share`` and ``release`` with the pages that went from one holder to two or
        from two to one (an index of idle pages follows from it). There is one listener."""
        assert self._listener is None, "the allocator is watched already"
        self._listener = listener

    def allocate(self, count: int, *, after: int | None = None, room: int = 0) -> list[int]:
        """``count`` pages with one reference each: those directly behind page ``after`` as far as they are free, then
        the lowest free run that holds the rest, or the longest runs where none does.

        With ``room``, pages that do not continue ``after`` leave that many free behind whoever lies in front of them,
        while some run is long enough: where all do so, sequences that grow side by side stay one run each.
        ``after`` is a page in use (the last one of the sequence that grows) or a reserved one. Raises ``OutOfPages``
        when fewer than ``count`` are free, ``ValueError`` for a free or unknown ``after``, a negative count or room.
        """
        if count < 0 or room < 0:
            raise ValueError(f"count {count} or room {room} is negative")
        if after is not None and not (0 <= after < self.reserved or self.references(after)):
            raise ValueError(f"page {after} is free: nothing grows behind it")
        if count > self._num_free:
            raise OutOfPages(wanted=count, free=self._num_free)
        pages: list[int] = []
        if after is not None and after + 1 in self._last_of:
            pages += self._take(after + 1, count)
        while len(pages) < count:
            rest = count - len(pages)
            first = self._lengths.lowest(rest + room)
            has_room = self._last_of[first] + 1 - first >= rest + room
            gap = room if has_room and first > self.reserved else 0
            pages += self._take(first if has_room else self._lengths.lowest(rest), rest, gap=gap)
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """One more reference on each page. Raises ``ValueError`` for a page that nobody holds."""
        for page in pages:
            if not self.references(page):
                raise ValueError(f"page {page} is free: it cannot be shared")
        counts, doubled = self._references, []
        for page in pages:
            counts[page] += 1
            if counts[page] == 2:
                doubled.append(page)
        self._notify(doubled)

    def release(self, pages: Sequence[int]) -> None:
        """One reference less on each page; a page without any is free. Raises ``ValueError`` for a page that nobody
        holds (released twice) or that is not this allocator's."""
        counts: list[int] = self._references
        freed, alone = [], []
        for index, page in enumerate(pages):
            if not self.reserved <= page < self.num_pages or not counts[page]:
                for done in pages[:index]:
                    counts[done] += 1
                raise ValueError(f"page {page} is held by nobody: it cannot be released")
            counts[page] -= 1
            if counts[page] == 1:
                alone.append(page)
            elif not counts[page]:
                freed.append(page)
        self._free(freed)
        self._notify(alone)

    def _notify(self, pages: list[int]) -> None:
        if pages and self._listener is not None:
            self._listener(pages)

    def _take(self, first: int, limit: int, *, gap: int = 0) -> range:
        """Up to ``limit`` pages of the free run that starts at ``first``, behind its first ``gap``."""
        last = self._last_of.pop(first)
        self._lengths.set(first, 0)
        if gap:
            self._put(first, first + gap - 1)
            first += gap
        end = min(last + 1, first + limit)
        if end <= last:
            self._put(end, last)
        else:
            del self._first_of[last]
        self._references[first:end] = [1] * (end - first)
        self._num_free -= end - first
        return range(first, end)

    def _free(self, pages: list[int]) -> None:
        pages.sort()
        start = 0
        for index, page in enumerate(pages):
            if index + 1 == len(pages) or pages[index + 1] != page + 1:
                self._free_run(pages[start], page)
                start = index + 1

    def _free_run(self, first: int, last: int) -> None:
        """Join pages ``first`` to ``last`` with the free runs on both sides."""
        self._num_free += last + 1 - first
        if first - 1 in self._first_of:
            first = self._first_of.pop(first - 1)
        if last + 1 in self._last_of:
            behind = last + 1
            last = self._last_of.pop(behind)
            self._lengths.set(behind, 0)
        self._put(first, last)

    def _put(self, first: int, last: int) -> None:
        self._last_of[first] = last
        self._first_of[last] = first
        self._lengths.set(first, last + 1 - first)
