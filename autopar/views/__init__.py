"""Reports: for a terminal, as one HTML file, and a step as a trace.

A `Page` holds what is shown. The views know costs (`autopar.cost_model.breakdown`) and nothing else.
"""

from autopar.views.bars import memory_bar, time_bar
from autopar.views.html import to_html, write_html
from autopar.views.page import BatchRow, BlockCollective, BlockNode, Formula, Page, RooflinePoint, StageRow
from autopar.views.stages import StageSummary
from autopar.views.tables import BatchTable, CandidateTable, SensitivityTable, Tree
from autopar.views.trace import read_trace, to_trace, write_trace
