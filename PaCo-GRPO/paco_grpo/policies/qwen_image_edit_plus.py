"""Qwen-Image-Edit-2509 and -2511: several reference images."""

from collections.abc import Sequence

from diffusers import QwenImageEditPlusPipeline
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import CONDITION_IMAGE_SIZE
from PIL import Image

from paco_grpo.policies.qwen_image_edit import QwenImageEditPolicy
from paco_grpo.policies.reference_image import Reference


class QwenImageEditPlusPolicy(QwenImageEditPolicy):
    """Qwen-Image-Edit-2509, -2511 and everything saved as a ``QwenImageEditPlusPipeline``.

    The text encoder sees each image at the pipeline's own area of 384² pixels, whatever size is
    generated.
    """

    pipeline_class = QwenImageEditPlusPipeline
    family = "Qwen-Image-Edit-Plus"
    several_images = True
    shape_from = -1

    def _seen(self, references: Sequence[Reference]) -> Sequence[Image.Image]:
        originals = [reference.original for reference in references]
        sizes = [
            self.fit_area(CONDITION_IMAGE_SIZE, image.width / image.height) for image in originals
        ]
        return [
            self.pipeline.image_processor.resize(i, *size)
            for i, size in zip(originals, sizes, strict=True)
        ]
