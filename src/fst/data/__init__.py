"""Data: laws and solvers, files, splits, and the batches that training and evaluation take.

`burgers` and `darcy` make samples; `BurgersData`, `DarcyData` and `PointData` are what a recipe
says about its data; `write_points` and `read_points` are for a user's own.
"""

from fst.data import burgers, cole_hopf, darcy
from fst.data.burgers_data import BurgersData
from fst.data.check import Description, check_file, check_folder
from fst.data.darcy_data import DarcyData
from fst.data.errors import DataError
from fst.data.point_data import PointData
from fst.data.point_files import Label, PointFile, PointSample, read_points
from fst.data.point_writer import Labels, write_points
from fst.data.samples import Batch, GridSamples, Samples, Statistics
from fst.data.splits import Partition, TestSplit, TrainingSplit, ValidationSplit

__all__ = [
    "Batch",
    "BurgersData",
    "DarcyData",
    "DataError",
    "Description",
    "GridSamples",
    "Label",
    "Labels",
    "Partition",
    "PointData",
    "PointFile",
    "PointSample",
    "Samples",
    "Statistics",
    "TestSplit",
    "TrainingSplit",
    "ValidationSplit",
    "burgers",
    "check_file",
    "check_folder",
    "cole_hopf",
    "darcy",
    "read_points",
    "write_points",
]
