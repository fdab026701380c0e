"""Hugging Face: conversion, weight files, model cards, the Hub, other toolkits' checkpoints."""
