"""The index under random operations: little room, where eviction happens all the time, and plenty, where the model
predicts every cached length exactly.
"""

from tests.index.machine import IndexMachine
from tests.index.profiles import machine_settings


class RoomyMachine(IndexMachine):
    roomy = True


TestTight = IndexMachine.TestCase
TestTight.settings = machine_settings(examples=150, steps=40, thorough_examples=6000)
TestRoomy = RoomyMachine.TestCase
TestRoomy.settings = machine_settings(examples=40, steps=40, thorough_examples=1500)
