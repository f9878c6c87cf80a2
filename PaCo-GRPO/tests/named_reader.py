"""A text reader that tests name by import path: the size of the image."""


def read_size(image):
    assert image.mode == "RGB"
    return f"is {image.width} x {image.height}!"
