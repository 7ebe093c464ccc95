#!/usr/bin/env bash
# From a folder of images to a model that grows, on synthetic images: about two minutes on two cores.
# docs/get-started/tutorial.md explains every command and shows what it prints.
#
#   examples/folder_workflow.sh [FOLDER]      a new folder for all of it; default: workflow
set -euo pipefail

target=${1:-workflow}
if [ -e "$target" ]; then
  echo "$target already exists. Remove it, or name another folder." >&2
  exit 4
fi
if ! command -v medcil > /dev/null; then
  echo "Cannot find the command medcil. Install it, or activate its environment (. .venv/bin/activate)." >&2
  exit 2
fi
mkdir -p "$target"
cd "$target"
set -v # show every line before it runs

# 1. Images as they arrive: a folder per class, and a manifest that names the patients.
medcil phantom --out images

# 2. A model of the first three classes. Small images, a small network, few epochs: quick, not good.
medcil train images/first --out model --side 48 --backbone resnet8_cifar --epochs 15

# 3. What it says about new images. One of them is no image: it becomes a row with its error.
echo "not an image" > images/new/013.png
medcil predict model images/new -o first-answers.csv

# 4. Two new classes arrive; the first images are no longer needed.
rm -r images/first
medcil update model images/second

# 5. A third delivery, first with a method that forgets: the gate keeps the old version (exit code 8).
medcil update model images/third --method finetune --epochs 5 --max-forgetting 15 || test $? -eq 8
medcil update model images/third --max-forgetting 15
medcil history model

# 6. How good is it on images that it has never seen, by class, patient, age and sex?
medcil evaluate model images/eval -o evaluation

# 7. Where does the answer come from?
medcil explain model images/eval/BCC/001.png -o explanation

# 8. Answers for a clinic: its own class frequencies, an operating point, abstention.
printf '%s\n' NV,0.60 BKL,0.15 DF,0.05 AKIEC,0.08 VASC,0.02 BCC,0.10 > clinic.csv
medcil predict model images/new -o predictions.csv --prior clinic.csv --sensitivity BCC=0.8 --abstain-below 0.5

# 9. One file for machines without torch.
medcil export model -o model.onnx
medcil predict model.onnx images/new -o predictions-onnx.csv --prior clinic.csv

# 10. A patient withdraws consent. Then: back to the version of two deliveries.
medcil erase model --patient P151
medcil rollback model v2
medcil history model

# 11. The model in a browser, on this machine only; Ctrl-C ends it:
#     medcil serve model
