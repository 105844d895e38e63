"""Pages and host slots that hold tags instead of bytes, and the copies between them.

A tag names what a token's keys and values depend on: model version, user, context, and every token up to it. A page
that holds the wrong tag would have been a wrong score.
"""

POISON = None


class TaggedStorage:
    """`device[page][row]` and `host[slot * slot_tokens + row]` are tags."""

    def __init__(self, page_size, num_pages, chunk_tokens, slot_tokens, num_chunks):
        self.page_size = page_size
        self.chunk_tokens = chunk_tokens
        self.slot_tokens = slot_tokens
        self.device = [[POISON] * page_size for _ in range(num_pages)]
        self.host = [POISON] * (num_chunks * chunk_tokens)

    def read(self, pages, first, end):
        """The tags of token rows [first, end), `pages` being those from token 0 on."""
        size = self.page_size
        return [self.device[pages[t // size]][t % size] for t in range(first, end)]

    def write(self, pages, first, tags):
        size = self.page_size
        for t, tag in enumerate(tags, first):
            self.device[pages[t // size]][t % size] = tag

    def task_rows(self, task):
        """For each token of a transfer task: (page, row in page, index into `host`)."""
        size, chunk = self.page_size, self.chunk_tokens
        for t in range(task.first, task.end):
            slot, order = task.blocks[t // chunk - task.first // chunk]
            row = t % chunk
            assert row < self.slot_tokens << order, f"token {t} lies outside its block of order {order}"
            yield task.pages[t // size - task.first // size], t % size, slot * self.slot_tokens + row

    def task_pages(self, task):
        return [self.device[page][row] for page, row, _ in self.task_rows(task)]

    def onload(self, task):
        for page, row, at in self.task_rows(task):
            self.device[page][row] = self.host[at]

    def offload(self, task, tags):
        for (_, _, at), tag in zip(self.task_rows(task), tags, strict=True):
            self.host[at] = tag
