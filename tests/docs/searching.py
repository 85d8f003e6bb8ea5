"""The ranking of the site's search, as Zensical computes it in a browser, where tools/docs_check.py looks at it.

A section is found if, for each word of the query, it has a word that begins with it. Sections that have one in their title
come first, then those with one in their place in the navigation, then those with one in their text. Among equals those come
first whose first group of neighbouring words has more words of the query, then those whose group is shorter, then those
where it is earlier.
"""

import functools
import itertools
import re
import unicodedata

FIELDS = "title", "path", "text"  # the most important first
NEAR = 10  # words between two of a group


def words(field, separator):
    """The words of a field, which is text with tags, or a list of texts."""
    pieces = field if isinstance(field, list) else [field]
    plain = unicodedata.normalize("NFKD", " ".join(re.sub(r"<[^>]*>", " ", piece) for piece in pieces))
    return [word for word in separator.split(plain.lower()) if word]


class Index:
    """The index that the generator has written, as JSON."""

    def __init__(self, index):
        self.separator = re.compile(index["config"]["separator"])
        self.items = [
            (item["location"], [words(item[field], self.separator) for field in FIELDS]) for item in index["items"]
        ]

    def hits(self, query):
        """The places found, the best first."""
        asked = words(query, self.separator)
        found = []
        for location, fields in self.items:
            if all(any(word.startswith(one) for field in fields for word in field) for one in asked):
                groups = [(rank, group(field, asked)) for rank, field in enumerate(fields)]
                found.append((location, [(rank, one) for rank, one in groups if one]))
        return [location for location, _ in sorted(found, key=functools.cmp_to_key(compared))]


def group(field, asked):
    """The places of the first group of neighbouring words of the query in a field."""
    places = [(at, k) for at, word in enumerate(field) for k, one in enumerate(asked) if word.startswith(one)]
    group = places[:1]
    for (last, before), (at, k) in itertools.pairwise(places):
        if at - last > NEAR or k == before:
            break
        same = next((n for n, (_, other) in enumerate(group) if other == k), None)
        if same is not None:
            group = group[: same + 1] if last - group[same][0] > at - last else group
            break
        group.append((at, k))
    return [at for at, _ in group]


def compared(one, other):
    """Negative if the first of two is better."""
    for mine, theirs in zip(one[1], other[1]):
        if key(*mine) != key(*theirs):
            return -1 if key(*mine) < key(*theirs) else 1
    return len(other[1]) - len(one[1])


def key(rank, group):
    """The order of groups, by the rank of their field first."""
    return rank, -len(group), 1 + group[-1] - group[0] if len(group) > 1 else NEAR, group[0]
