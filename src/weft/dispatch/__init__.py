"""From a public operator to a kernel: registration with torch, choice by measurement, fast path, autocast."""
