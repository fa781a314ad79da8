"""The planner: memory, time and exposed communication of a layout, from a model config and a cluster.

Formulas are pure Python; torch is imported only where a module on the meta device is read or a machine is measured.
"""

from __future__ import annotations
