"""The digest of a part of a file, which stands for a whole model's."""

from ulysses.disk import CHUNK, sampled_digest


def test_sampled_digest_sees_the_header_the_size_and_blocks_everywhere(tmp_path):
    path, size = tmp_path / "weights", 8 << 20
    found = set()
    for place in (None, 10, CHUNK - 1, size // 2 + 100, size - size // 64 + 100):
        content = bytearray(size)
        if place is not None:
            content[place] = 1
        path.write_bytes(content)
        found.add(sampled_digest(path))
    path.write_bytes(bytes(size - 1))
    assert len(found | {sampled_digest(path)}) == 6
