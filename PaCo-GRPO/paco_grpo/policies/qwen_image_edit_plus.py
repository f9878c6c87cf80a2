"""Qwen-Image-Edit-2509 and -2511: several reference images, which the text encoder sees at a size of their own."""

from diffusers import QwenImageEditPlusPipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as stock

from paco_grpo.policies.diffusers_policy import EncoderImages
from paco_grpo.policies.qwen_image_edit import QwenImageEditPolicy
from paco_grpo.policies.reference_image import Reference, image_digest


class QwenImageEditPlusPolicy(QwenImageEditPolicy):
    """Qwen-Image-Edit-2509, -2511 and everything saved as a ``QwenImageEditPlusPipeline``.

    The text encoder sees each image at the pipeline's own area of 384² pixels, whatever size is generated. The transformer of
    2511 (``zero_cond_t``) modulates reference tokens as at σ = 0, by itself.
    """

    pipeline_class = QwenImageEditPlusPipeline
    family = "Qwen-Image-Edit-Plus"
    several_images = True
    shape_from = -1

    def _seen(self, references: tuple[Reference, ...]) -> EncoderImages:
        images = tuple(
            self.pipeline.image_processor.resize(
                reference.original,
                *self.fit_area(stock.CONDITION_IMAGE_SIZE, reference.original.width / reference.original.height),
            )
            for reference in references
        )
        return EncoderImages(images, tuple((image_digest(image), image.size) for image in images))
