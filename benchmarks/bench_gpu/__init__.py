"""Steps of common model shapes on a GPU, compared with the limits of the device."""
