# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""An NMM over the pixels of images."""

from pyro_nmm.models.images.convolution import ConvolutionalNMM
from pyro_nmm.models.images.denoiser import Denoiser
from pyro_nmm.models.images.unet import UNet

__all__ = ["ConvolutionalNMM", "Denoiser", "UNet"]
