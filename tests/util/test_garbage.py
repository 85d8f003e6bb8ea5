"""Garbage collection put off: collections of young objects pass over what an import has left."""

from processes import run_python

FOUND = """
import gc, sys
from cupyops._util.garbage import collected_later
gc.unfreeze()
frozen = len(sys.argv) > 1
if frozen:
    gc.freeze()
count = gc.get_freeze_count()
with collected_later():
    assert not gc.isenabled()
    made = [[number] for number in range(5000)]
gc.disable()
assert gc.get_freeze_count() == count
young = {id(one) for generation in (0, 1) for one in gc.get_objects(generation)}
print(sum(id(one) in young for one in made))
"""


def test_what_was_made_inside_is_old():
    done = run_python("-c", FOUND)
    assert done.stdout.strip() == "0", done.stderr


def test_what_a_program_has_frozen_stays_so():
    done = run_python("-c", FOUND, "frozen")
    assert done.stdout.strip() == "5000", done.stderr
