"""Command-line overrides that shrink any recipe to seconds on a CPU."""

MODEL = (
    "--model.width 16 --model.heads 2 --model.fourier-bands 4 --model.rows 4 "
    "--model.anchors-per-row 4 --model.predictor-width 8 --model.predictor-heads 2 "
    "--model.predictor-blocks 1 --model.refinement-steps 2 --model.points-from-anchors 4 "
    "--model.points-from-sobol 4"
).split()
TRAINING = (
    "--training.batch-size 2 --training.queries 16 --training.schedule.maximum 6 "
    "--training.schedule.warmup 2 --training.validate-every 3 --training.checkpoint-every 3 "
    "--training.log-every 1 --training.no-tensorboard --training.precision fp32"
).split()
# Schedules in stages have no warm-up.
_WARMUP = TRAINING.index("--training.schedule.warmup")
STAGED = TRAINING[:_WARMUP] + TRAINING[_WARMUP + 2 :]
BURGERS = (
    "--data.training 6 --data.validation 2 --data.test 2 --data.points 32 --data.times 11 "
    "--data.supervision-grid 5 8 --data.validation-grid 5 8 "
    "--evaluation.grids 5 8 11 32 --evaluation.neighbors --evaluation.paper-errors"
).split()
DARCY = (
    "--data.training 6 --data.validation 2 --data.test 2 --data.training-file 8 "
    "--data.resolution 16 --data.fine 32 --data.validation-grid 5 5 "
    "--evaluation.grids 16 16 --evaluation.neighbors 2 --evaluation.paper-errors"
).split()
