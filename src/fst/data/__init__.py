"""Data: equations and solvers, files, splits, and the batches that training and evaluation take.

`burgers` and `darcy` make samples; `BurgersData`, `DarcyData` and `PointData` are what a recipe
says about its data; `write_points` and `read_points` are for a user's own. `ImageData` is for
labelled images.
"""

from fst.data import burgers, cole_hopf, darcy
from fst.data.burgers_data import BurgersData
from fst.data.check import Description, check_file, check_folder, check_images
from fst.data.conversion import from_grid, from_meshes, from_table, from_xarray
from fst.data.darcy_data import DarcyData
from fst.data.dataset import PointDataset, collate
from fst.data.files import DataError
from fst.data.image_augmentation import ImageAugmentation
from fst.data.image_data import ImageData
from fst.data.image_samples import ImageBatch, ResidentImages, StreamedImages
from fst.data.images import Skipped
from fst.data.point_data import PointData
from fst.data.point_files import (
    Label,
    Labels,
    PointFile,
    PointFunctions,
    PointSample,
    read_points,
    write_points,
)
from fst.data.samples import Batch, BurgersSamples, GridSamples, Samples, Statistics
from fst.data.source import Partition, TestSplit, TrainingSplit, ValidationSplit

__all__ = [
    "Batch",
    "BurgersData",
    "BurgersSamples",
    "DarcyData",
    "DataError",
    "Description",
    "GridSamples",
    "ImageAugmentation",
    "ImageBatch",
    "ImageData",
    "Label",
    "Labels",
    "Partition",
    "PointData",
    "PointDataset",
    "PointFile",
    "PointFunctions",
    "PointSample",
    "ResidentImages",
    "Samples",
    "Skipped",
    "Statistics",
    "StreamedImages",
    "TestSplit",
    "TrainingSplit",
    "ValidationSplit",
    "burgers",
    "check_file",
    "check_folder",
    "check_images",
    "cole_hopf",
    "collate",
    "darcy",
    "from_grid",
    "from_meshes",
    "from_table",
    "from_xarray",
    "read_points",
    "write_points",
]
